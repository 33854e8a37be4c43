"""The GPT: its layers, the ops they call, and text generation; it knows no ranks."""
