"""The price of a plan: event simulation, synchronisation, memory."""
