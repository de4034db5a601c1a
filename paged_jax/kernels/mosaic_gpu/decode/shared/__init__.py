"""Attention of a decode batch whose queries share prefixes, in one launch and a merge."""
