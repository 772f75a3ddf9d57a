"""What tests of weightwire and of transports stand on: warm rank processes, named faults, measurements.

A leaf: nothing outside tests and benchmarks imports it. Needs the extra `weightwire[testing]`.
"""
