"""The upstream libraries: what is installed, whether it is what we pinned, and the overlay that carries our change.

Order of use: :func:`~xstage_plugin.upstream.find.probe_installed`, :mod:`~xstage_plugin.upstream.check`,
:func:`~xstage_plugin.upstream.overlay.build_overlay`, :func:`~xstage_plugin.upstream.activate.activate`;
:func:`~xstage_plugin.upstream.activate.ensure_active` does all of it.
"""
