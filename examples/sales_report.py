"""Read sales.csv, print revenue by region and quarter, and draw it as sales.png.

Both files are in the working directory. `make run` runs it like this:
cloche run examples/sales_report.py --file examples/sales.csv --out build/report --memory 512m
"""

import matplotlib as mpl
import pandas as pd

mpl.use("Agg")

import matplotlib.pyplot as plt


def revenue_by_region_and_quarter(csv_path: str) -> pd.DataFrame:
    """Return revenue after discount, one row per region, one column per quarter and a total."""
    sales = pd.read_csv(csv_path, parse_dates=["date"])
    sales["revenue"] = sales["units"] * sales["unit_price"] * (1 - sales["discount"])
    sales["quarter"] = "Q" + sales["date"].dt.quarter.astype(str)
    table = sales.pivot_table(index="region", columns="quarter", values="revenue", aggfunc="sum", fill_value=0)
    table["total"] = table.sum(axis=1)
    return table.sort_values("total", ascending=False)


def draw(table: pd.DataFrame, png_path: str) -> None:
    """Write a stacked bar chart of the quarters."""
    axes = table.drop(columns="total").plot.bar(stacked=True, figsize=(8, 4.5), rot=0, width=0.7)
    axes.set_title("Revenue after discount, by region and quarter")
    axes.set_xlabel("")
    axes.yaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.legend(title="")
    axes.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.savefig(png_path, dpi=120)


table = revenue_by_region_and_quarter("sales.csv")
print(table.round(0).astype(int).rename_axis(index=None, columns=None).to_string())
draw(table, "sales.png")
