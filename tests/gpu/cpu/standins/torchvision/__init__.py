"""Image transforms, imported by SGLang's multimodal processors: nothing of it runs on text."""

from _standin import standin

standin("torchvision", __version__="0.28.0")
