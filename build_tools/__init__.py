"""For people with the source tree: bring the submodules to their pins and place our headers in them. Builds nothing."""
