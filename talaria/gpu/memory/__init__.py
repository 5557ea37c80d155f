"""Bytes on the move: physical memory at fixed addresses, copies behind events, and the KV pages that the host keeps."""
