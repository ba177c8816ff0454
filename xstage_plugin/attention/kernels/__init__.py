"""Kernel classes in CuTe DSL. Importing a module of this folder imports flash-attn-4 and torch: do it inside a function."""
