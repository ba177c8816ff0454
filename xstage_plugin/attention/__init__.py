"""Ulysses attention: when output tiles can go straight to their owner."""
