"""The method: read a model's KV cache, map it into another model's. Imports torch, never gradio or plotly."""
