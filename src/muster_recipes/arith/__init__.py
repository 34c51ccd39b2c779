"""Recipe ``arith``: a small language model that learns multi-step arithmetic from scratch."""
