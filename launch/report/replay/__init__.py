"""What a simulation of coming and going devices looks like: text, a picture, and one HTML page."""
