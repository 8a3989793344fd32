"""Generation engines beside each other: what they are asked, who answers, how that is timed, and what bounds it."""
