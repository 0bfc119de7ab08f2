"""The analyzer: trace files in, Report out. Requires neither torch nor a display.

The exported names are listed in __init__.pyi and imported on first use, so that a worker process or
a prediction loads only the modules that it needs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
