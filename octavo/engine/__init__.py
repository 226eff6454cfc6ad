"""Composition root, step loop, process boundary, service. Knows no HTTP.

Importing this package, which happens before torch is loaded, bounds how long a thread of an OpenMP
team spins before it sleeps (libgomp reads the variable once). A step has several hundred
parallel regions; with libgomp's own bound, a core that is busy with something else makes every
region wait out a time slice while the waiting thread burns the other core (docs/log.md,
2026-12-01). A value that the user has set is kept.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
