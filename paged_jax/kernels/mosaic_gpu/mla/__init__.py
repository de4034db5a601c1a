"""The MLA kernel: multi-head latent attention of any number of queries a sequence."""
