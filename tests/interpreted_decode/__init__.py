"""Substitutes for the PTX of the decode kernel, for Pallas's interpreter."""
