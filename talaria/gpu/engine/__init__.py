"""SGLang servers of one TP group: started, guarded, switched and restarted. Nothing here decides; nothing here imports sglang."""
