"""Functions on tensors: one folder per op (contract, plain reference, fast twins) and one registry that chooses between them."""
