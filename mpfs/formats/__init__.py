"""Checkpoint files, read and written: safetensors, torch pickles, the Hugging Face layout. Knows no store."""
