"""Semi-supervised variational autoencoders under few and wrong labels."""
