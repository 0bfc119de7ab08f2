"""Integrations of the recorder with training frameworks, one module per framework.

They are not imported with stepsplit.collectors; each module imports its own framework.
"""
