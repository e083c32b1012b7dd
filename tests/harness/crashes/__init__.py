"""The crash harness: processes that die at every statement boundary, and the books that must balance after it.

As a program (`python -m tests.harness.crashes` at the checkout's root) it is __main__.py; tests import its modules.
"""
