"""The notebook's measurements, each one command and one figure, and one page of all of them.

Every module here but the last few is one measurement: a class that measures, becomes plain data and comes back from it,
and says of itself in a figure, sentences and tables. Adding one is writing such a class and naming it in :data:`ALL`.
"""

from dspark_fast.report.making import ALL, NotLossless, ReportSettings, run
from dspark_fast.report.measurement import Measurement, NotMeasurable

__all__ = ["run", "ReportSettings", "ALL", "Measurement", "NotMeasurable", "NotLossless"]
