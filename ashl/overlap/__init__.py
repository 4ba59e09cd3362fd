"""When a gradient travels: in one piece once backward is over, in parts while backward goes on,
also under the next forward pass, or while the next piece of work is computed.

    messages(chain) -> how many layer groups each message holds, in the order in which backward
    comes to them

Sums in rank order are the same to the bit however they are cut, so only two kinds of options change
what is computed: those by which a codec works in each message by itself, and those by which work
lands one exchange late.
"""
