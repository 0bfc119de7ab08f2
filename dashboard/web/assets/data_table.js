/* Tables that sort, filter, page and download their rows (DataTable), and the numbers of a chart as
   such a table (ChartData): two components of Dash. */
(function () {
  "use strict";

  const PAGE_ROWS = 12, CSV_TYPE = "text/csv;charset=utf-8";

  const element = (...parts) => window.React.createElement(...parts);

  /* Cells: a text, a text with its number, or an object for anything else. */

  const shownOf = (cell) => (Array.isArray(cell) ? cell[0] : typeof cell === "object" && cell ? cell.shown : cell);
  const columnsOf = (cell) => (cell && cell.columns) || 1;

  function valueOf(cell) {
    const value = Array.isArray(cell) ? cell[1] : cell && cell.value;
    return typeof value === "number" ? value : null;
  }

  function textOf(node) {
    if (node === null || node === undefined) return "";
    if (Array.isArray(node)) return node.map(textOf).join("");
    if (typeof node !== "object") return String(node);
    /* Parts of a cell that stand below each other are apart. */
    return (node.tag === "div" ? " " : "") + textOf(node.children);
  }

  const cellText = (cell) => textOf(shownOf(cell)).trim().replace(/\s+/g, " ");

  function followLink(event) {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    window.stepsplitOpen(event.currentTarget.href);
    window.scrollTo(0, 0);
  }

  function draw(node, key) {
    if (Array.isArray(node)) return node.map(draw);
    if (node === null || typeof node !== "object") return node;
    const isLink = node.tag === "link", props = { ...node.props, key };
    if (isLink) props.onClick = followLink;
    const children = node.children === null || node.children === undefined ? [] : [draw(node.children)];
    return element(isLink ? "a" : node.tag, props, ...children);
  }

  /* Order and selection of rows. Rows without a number come last in either direction. */

  const collator = new Intl.Collator(undefined, { numeric: true });

  function indexRows(rows) {
    return rows.map((cells, key) => ({ cells, key, text: cells.map(cellText).join(" ").toLowerCase() }));
  }

  /* Rows under a heading stay there. */
  const hasHeadings = (cells) => cells.some((cell) => cell && (cell.head || columnsOf(cell) > 1));

  function hasNumbers(rows, column) {
    return rows.some((row) => valueOf(row.cells[column]) !== null);
  }

  function sortRows(rows, sort) {
    if (!sort) return rows;
    const numeric = hasNumbers(rows, sort.column), sign = sort.order === "ascending" ? 1 : -1;
    return rows.slice().sort((one, other) => {
      const a = one.cells[sort.column], b = other.cells[sort.column];
      if (!numeric) return sign * collator.compare(cellText(a), cellText(b)) || one.key - other.key;
      const x = valueOf(a), y = valueOf(b);
      if (x === null || y === null) return (x === null) - (y === null) || one.key - other.key;
      return sign * (x - y) || one.key - other.key;
    });
  }

  function selectRows(rows, words) {
    const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
    return rows.filter((row) => parts.every((part) => row.text.includes(part)));
  }

  /* The first click on a header sorts numbers from the largest on, the third one restores the order
     of the server. */
  function nextSort(sort, column, numeric) {
    const [first, second] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
    if (!sort || sort.column !== column) return { column, order: first };
    return sort.order === first ? { column, order: second } : null;
  }

  /* Comma-separated values, with unrounded numbers in the unit of the header. Columns in which this
     table has nothing are in it, so that the files of two runs have the same ones. */

  function quote(text) {
    /* Spreadsheets run a text that looks like a formula. */
    const safe = /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
    return /[",\n\r]/.test(safe) ? '"' + safe.replace(/"/g, '""') + '"' : safe;
  }

  function writeCsv(columns, rows) {
    const numeric = columns.map((column, i) => hasNumbers(rows, i));
    const heads = columns.map((column, i) => {
      const text = textOf(column.head).trim();
      return quote(numeric[i] && column.unit ? text + " (" + column.unit + ")" : text);
    });
    const lines = rows.map((row) => row.cells.map((cell, i) => {
      const value = valueOf(cell);
      return value !== null ? String(value) : numeric[i] && !cellText(cell) ? "" : quote(cellText(cell));
    }));
    return [heads, ...lines].map((line) => line.join(",") + "\r\n").join("");
  }

  function nameFile(place) {
    const section = place.closest("section"), heading = section && section.querySelector("h2");
    const parts = [document.querySelector("#page h1"), heading].map((one) => (one ? one.textContent : ""));
    return parts.join(" ").trim().toLowerCase().replace(/[^a-z0-9.]+/g, "_").slice(0, 100) + ".csv";
  }

  function download(name, text) {
    const link = document.createElement("a"), address = URL.createObjectURL(new Blob([text], { type: CSV_TYPE }));
    link.href = address;
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  /* Parts of the table. */

  const button = (text, act, more) => element("button", { type: "button", onClick: act, ...more }, text);

  function drawHead(column, i, sort, act, numeric) {
    if (column.hidden) return null;
    const props = { key: i, scope: "col", className: column.number ? "number" : "" };
    if (column.sort) return element("th", { ...props, "aria-sort": column.sort }, draw(column.head));
    const text = textOf(column.head);
    if (!act || !text) return element("th", props, draw(column.head));
    const order = sort && sort.column === i ? sort.order : "none";
    const mark = { none: "", ascending: " ▲", descending: " ▼" }[order];
    return element("th", { ...props, "aria-sort": order },
      button([text, element("span", { key: "mark", "aria-hidden": true }, mark)], () => act(nextSort(sort, i, numeric(i))),
        { className: "sort" }));
  }

  function drawRow(row, columns) {
    const cells = row.cells.map((cell, i) => {
      if (columns[i].hidden) return null;
      const props = { key: i, className: columns[i].number ? "number" : "" };
      if (columnsOf(cell) > 1) Object.assign(props, { colSpan: columnsOf(cell), className: "" });
      if (cell && cell.head) return element("th", { ...props, scope: "row" }, draw(shownOf(cell)));
      return element("td", props, draw(shownOf(cell)));
    });
    return element("tr", { key: row.key }, ...cells);
  }

  function drawPager(from, count, total, setFrom, showAll) {
    if (count <= PAGE_ROWS) return count < total ? element("span", { key: "count" }, count + " of " + total + " rows") : null;
    const to = Math.min(from + PAGE_ROWS, count);
    return element("span", { key: "count", className: "pager" },
      element("span", null, "rows " + (from + 1) + " to " + to + " of " + count + (count < total ? " found" : "")),
      button("previous", () => setFrom(Math.max(0, from - PAGE_ROWS)), { disabled: from === 0 }),
      button("next", () => setFrom(from + PAGE_ROWS), { disabled: to === count }),
      button("all", showAll));
  }

  function DataTable({ columns, rows }) {
    const { useState, useMemo } = window.React;
    const [sort, setSort] = useState(null), [words, setWords] = useState("");
    const [from, setFrom] = useState(0), [whole, setWhole] = useState(false);
    const [last, setLast] = useState(rows);
    if (last !== rows) {
      /* Another page at the same place. */
      setLast(rows); setSort(null); setWords(""); setFrom(0); setWhole(false);
    }
    const indexed = useMemo(() => indexRows(rows), [rows]);
    const isOwn = !columns.some((column) => column.sort), isPlain = isOwn && !rows.some(hasHeadings);
    const isLong = isPlain && indexed.length > PAGE_ROWS;
    const found = useMemo(() => sortRows(selectRows(indexed, words), sort), [indexed, words, sort]);
    const first = from < found.length ? from : 0;
    const shown = isLong && !whole ? found.slice(first, first + PAGE_ROWS) : found;
    const act = isPlain && rows.length > 1 ? (next) => { setSort(next); setFrom(0); } : null;
    const head = columns.map((column, i) => drawHead(column, i, sort, act, (at) => hasNumbers(indexed, at)));
    const table = element("table", null,
      element("thead", null, element("tr", null, ...head)),
      element("tbody", null, ...shown.map((row) => drawRow(row, columns))));
    const search = element("input", {
      type: "search", placeholder: "filter", "aria-label": "filter the rows of this table", value: words, maxLength: 200,
      onChange: (event) => { setWords(event.target.value); setFrom(0); },
    });
    const pager = isLong && !whole ? drawPager(first, found.length, indexed.length, setFrom, () => setWhole(true)) : null;
    const csv = button("CSV", (event) => download(nameFile(event.currentTarget), writeCsv(columns, found)), {
      title: "download these rows with unrounded numbers", "aria-label": "download these rows as CSV",
    });
    return element("div", { className: "data-table" }, element("div", { className: "scroll" }, table),
      isOwn && rows.length > 0 && element("div", { className: "table-tools" }, isLong ? search : null,
        element("span", { role: "status" }, pager), csv));
  }

  /* The numbers of a chart: a row per point, or a row per category if all series share them. */

  const listOf = (values) => Array.from(values && values._inputArray ? values._inputArray : values || []);
  // A label of a chart may have two lines.
  const toCell = (value) => (typeof value === "number" ? [Number(value.toPrecision(6)).toLocaleString("en"), value] : String(value ?? "").replaceAll("<br>", " "));
  const titleOf = (axis, fallback) => (axis && axis.title && axis.title.text) || fallback;

  function tabulateGrid(trace, layout) {
    const rows = [], across = listOf(trace.x);
    listOf(trace.y).forEach((down, i) => across.forEach((right, j) => {
      const value = trace.z[i][j];
      if (Number.isFinite(value)) rows.push([String(down), String(right), toCell(value)]);
    }));
    const title = trace.colorbar && trace.colorbar.title && trace.colorbar.title.text;
    return { heads: [titleOf(layout.yaxis, "row"), titleOf(layout.xaxis, "column"), title || "value"], rows };
  }

  /* A place, with the link that the mark of the chart is. */
  function placeCell(plot, trace, i, shown) {
    const point = { data: trace, pointNumber: i, x: listOf(trace.x)[i], y: listOf(trace.y)[i] };
    const href = window.stepsplitMarks && window.stepsplitMarks.findAddress(plot, point), cell = toCell(shown);
    if (!href) return cell;
    const text = Array.isArray(cell) ? cell[0] : cell;
    return { shown: { tag: "link", props: { href }, children: text }, value: Array.isArray(cell) ? cell[1] : null };
  }

  function tabulatePoints(traces, plot) {
    const layout = plot._fullLayout;
    const isHorizontal = traces.every((trace) => trace.orientation === "h");
    const [at, of] = isHorizontal ? ["y", "x"] : ["x", "y"];
    const places = listOf(traces[0][at]).map(String);
    const shared = traces.every((trace) => !trace.base && String(listOf(trace[at])) === String(places));
    const heads = [titleOf(layout[at + "axis"], ""), titleOf(layout[of + "axis"], "value")];
    if (shared && new Set(places).size === places.length) {
      const series = traces.map((trace) => listOf(trace[of]));
      const named = traces.length > 1 ? traces.map((trace) => trace.name + ", " + heads[1]) : [heads[1]];
      return { heads: [heads[0], ...named], rows: places.map((place, i) => [placeCell(plot, traces[0], i, place), ...series.map((own) => toCell(own[i]))]) };
    }
    const rows = traces.flatMap((trace) => {
      const values = listOf(trace[of]), starts = trace.base === undefined ? null : listOf(trace.base);
      return listOf(trace[at]).map((place, i) => [
        trace.name || "", placeCell(plot, trace, i, place), ...(starts ? [toCell(starts[i])] : []), toCell(values[i]),
      ]);
    });
    const based = traces.some((trace) => trace.base !== undefined);
    return { heads: ["series", heads[0], ...(based ? ["from"] : []), heads[1]], rows };
  }

  function tabulateChart(plot) {
    const traces = (plot._fullData || []).filter((trace) => trace.hoverinfo !== "skip" && (trace.x || trace.y));
    if (!traces.length) return { heads: ["chart"], rows: [] };
    return traces[0].type === "heatmap" ? tabulateGrid(traces[0], plot._fullLayout) : tabulatePoints(traces, plot);
  }

  function ChartData({ chart }) {
    const [data, setData] = window.React.useState(null);
    const read = (event) => {
      const plot = event.currentTarget.open && document.querySelector("#" + CSS.escape(chart) + " .js-plotly-plot");
      setData(plot ? tabulateChart(plot) : null);
    };
    const table = data && element(DataTable, {
      columns: data.heads.map((head, i) => ({ head, number: data.rows.some((row) => Array.isArray(row[i])), unit: "" })),
      rows: data.rows,
    });
    return element("details", { className: "more chart-data", onToggle: read },
      element("summary", null, "data of this chart"), table);
  }

  window.stepsplit = { DataTable, ChartData };
})();
