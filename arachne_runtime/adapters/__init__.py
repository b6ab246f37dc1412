"""HeteroDDP and HeteroLoader inside the loops of others; each module needs the package of its name.

Nothing else imports them, so that the packages stay extras.
"""
