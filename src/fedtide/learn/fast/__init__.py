"""Gradients of small networks, of one client or of many at once, without autograd or torch.func."""
