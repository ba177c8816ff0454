"""For people with the source tree: bring the submodules to their pins and put our changes into them. Builds nothing."""
