"""Text generation with models in Hugging Face's folders."""
