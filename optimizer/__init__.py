"""A compact torch.fx graph optimizer for inference."""
