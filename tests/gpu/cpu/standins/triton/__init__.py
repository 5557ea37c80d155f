"""GPU kernels are declared with Triton when SGLang is imported; none is launched on the CPU. Arithmetic helpers are real."""

from _standin import standin


class Config:
    """An autotuning configuration: only ever listed."""

    def __init__(self, kwargs: dict[str, object] | None = None, **options: object) -> None:
        self.kwargs = {**(kwargs or {}), **options}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


standin("triton", __version__="3.6.0", Config=Config, cdiv=cdiv, next_power_of_2=next_power_of_2)
