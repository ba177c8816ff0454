"""MegaMoE: workload and tile times, the interleaving equations, the advisor."""
