"""Plain vectorised torch: the CPU default, and what ``torch.compile`` sees."""
