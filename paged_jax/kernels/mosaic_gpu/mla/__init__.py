"""The MLA kernel: multi-head latent attention with any number of queries for each sequence."""
