"""Causal language models of Hugging Face transformers as blocks, from a config or a local folder."""

from .adapter import HuggingFaceModel, huggingface
from .loss import causal_lm_loss, causal_lm_tokens

__all__ = ["HuggingFaceModel", "causal_lm_loss", "causal_lm_tokens", "huggingface"]
