"""`octavo bench`: a load generator for Octavo's gRPC API and for any OpenAI-compatible HTTP server.

arrivals, prompts, workload   what is sent and when; pure and seeded
target                        what can be measured: one interface, with a client file per protocol
runner                        sends, in a closed or an open loop, and keeps a record per request
figures                       records to figures; the definitions of the figures are there
report, document, plots       figures to a table, a JSON file, a picture
session                       one run from the first look at the server to its figures
"""
