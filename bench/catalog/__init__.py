"""Makes the catalog's data files from a folder of public measurements: python -m bench.catalog FOLDER."""
