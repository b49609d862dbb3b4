"""What finetune's and rlhf's files still import; it is in evaluate.py."""

from evaluate import token_losses  # noqa: F401
