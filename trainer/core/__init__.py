"""The core: a trainer that stands alone, without the companions beside it."""
