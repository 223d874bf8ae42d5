"""Bytes: frames, tensors, pickling, and messages as frames. Knows nothing of sockets."""
