"""When a gradient travels: in one piece once backward is over, in parts while backward goes on, or also under the next
forward pass.

    messages(chain) -> how many layer groups each message holds, in the order in which backward comes to them

No option changes what is computed: sums in rank order are the same to the bit however they are cut.
"""
