"""The recorder inside other people's training loops: a module a framework.

None is imported with stepsplit.collectors; each imports its own framework, when it is imported.
"""
