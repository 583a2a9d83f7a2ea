"""Hugging Face: models, adapters and chats as a task takes them, and folders that a run writes."""
