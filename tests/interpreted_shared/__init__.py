"""Substitutes for the PTX of the kernel of shared prefixes, for Pallas's interpreter."""
