"""Redaction: a copy of a recording that can be passed on.

Only what is known to be public is copied: the fields listed in `fields`, in the forms of `forms`,
and names of `names` that are made of public words. Any other text gets a pseudonym, the same one
wherever it occurs; any other field is dropped.
"""

from stepsplit.analyzer.redact.pseudonyms import Replacement
from stepsplit.analyzer.redact.recording import Redaction, redact_recording

__all__ = ["Redaction", "Replacement", "redact_recording"]
