"""How a decode step's attention is cut where the device alone knows the contexts. A part of paged attention, and no op
of its own.
"""
