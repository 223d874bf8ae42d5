"""TorchScript: calls, references and backward passes made by scripts, which run without Python."""
