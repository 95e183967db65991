"""DeepSpeed's config file: its keys and their fates, read and checked. `zjax.interop` makes configs of it."""

from zjax.ds_config.keys import AUTO, KEYS, Fate
from zjax.ds_config.read import DeepSpeedFile, Row, Source, load, read, shown
from zjax.ds_config.zero import zero_knobs
