"""Grafana's dashboard model, as far as the dashboards use it: rows, panels, queries, variables."""

GRID_COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

# Selects the daemons that the variables choose. Regular expressions that match "" let set-ups
# without a `node` label through.
DAEMONS = 'job=~"$job", node=~"$node", instance=~"$instance"'
TENANTS = f'{DAEMONS}, tenant=~"$tenant"'
DAEMON = "{{node}} {{instance}}"  # the legend of a series per daemon

GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "text"


class Query:
    """One PromQL query of a panel. `instant`: only the newest value, for tables and bars."""

    def __init__(self, expr, legend="", instant=False, heatmap=False):
        self.expr = expr
        self.legend = legend
        self.instant = instant
        self.heatmap = heatmap

    def to_json(self, index):
        kind = "table" if self.instant else "heatmap" if self.heatmap else "time_series"
        return {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": self.expr,
                "legendFormat": self.legend or "__auto", "format": kind,
                "instant": self.instant, "range": not self.instant, "editorMode": "code"}


class Panel:
    """A panel of any type; the functions below make the types that the dashboards use."""

    def __init__(self, kind, title, description, queries, unit="short", width=8, height=7,
                 options=None, custom=None, steps=None, mappings=None, minimum=None, maximum=None,
                 transformations=None, overrides=None):
        self.kind = kind
        self.title = title
        self.queries = queries
        self.width = width
        self.height = height
        defaults = {"unit": unit, "custom": custom or {}, "mappings": mappings or [],
                    "color": {"mode": "thresholds" if steps else "palette-classic"},
                    "thresholds": {"mode": "absolute", "steps": thresholds(steps or ())}}
        if minimum is not None:
            defaults["min"] = minimum
        if maximum is not None:
            defaults["max"] = maximum
        self.body = {"type": kind, "title": title, "description": description,
                     "datasource": DATASOURCE, "options": options or {},
                     "fieldConfig": {"defaults": defaults, "overrides": overrides or []}}
        if transformations:
            self.body["transformations"] = transformations

    def to_json(self, identity, x, y):
        return {"id": identity, **self.body,
                "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
                "targets": [query.to_json(i) for i, query in enumerate(self.queries)]}


def thresholds(steps):
    """((value, color), ...): the color from that value on; green below the first."""
    return [{"color": GREEN, "value": None}, *({"color": color, "value": value}
                                               for value, color in steps)]


def graph(title, description, *queries, stack=False, steps=None, **options):
    """Lines over time, or areas one upon the other. Thresholds are drawn as lines."""
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 40 if stack else 8,
              "showPoints": "never", "spanNulls": False,
              "stacking": {"mode": "normal" if stack else "none", "group": "A"},
              "thresholdsStyle": {"mode": "dashed" if steps else "off"}}
    panel = Panel("timeseries", title, description, queries, custom=custom, steps=steps,
                  options={"legend": {"displayMode": "list", "placement": "bottom",
                                      "showLegend": True},
                           "tooltip": {"mode": "multi", "sort": "desc"}},
                  minimum=options.pop("minimum", 0), **options)
    panel.body["fieldConfig"]["defaults"]["color"]["mode"] = "palette-classic"
    return panel


def stat(title, description, query, steps=None, text="auto", **options):
    """One number, colored by thresholds; `text` "name" shows the legend instead."""
    return Panel("stat", title, description, (query,), steps=steps or (),
                 options={"reduceOptions": {"calcs": ["lastNotNull"], "fields": "",
                                            "values": False},
                          "colorMode": "value", "graphMode": "area", "textMode": text,
                          "justifyMode": "auto", "orientation": "auto"},
                 width=options.pop("width", 3), height=options.pop("height", 4), **options)


def bars(title, description, *queries, steps=None, **options):
    """One horizontal bar for each series, by its newest value."""
    return Panel("bargauge", title, description, queries, steps=steps,
                 options={"reduceOptions": {"calcs": ["lastNotNull"], "fields": "",
                                            "values": False},
                          "orientation": "horizontal", "displayMode": "basic",
                          "showUnfilled": True, "valueMode": "color"}, **options)


def states(title, description, query, values, **options):
    """A lane for each series, colored by state. `values`: {number: (text, color)}."""
    mappings = [{"type": "value", "options": {
        str(value): {"text": text, "color": color, "index": index}
        for index, (value, (text, color)) in enumerate(values.items())}}]
    return Panel("state-timeline", title, description, (query,), mappings=mappings,
                 custom={"lineWidth": 0, "fillOpacity": 80},
                 options={"mergeValues": True, "showValue": "never", "rowHeight": 0.8,
                          "alignValue": "left",
                          "legend": {"displayMode": "list", "placement": "bottom",
                                     "showLegend": True}}, **options)


def heatmap(title, description, expr, **options):
    """How a histogram's events are spread over its buckets, over time."""
    return Panel("heatmap", title, description, (Query(expr, "{{le}}", heatmap=True),),
                 options={"calculate": False, "cellGap": 1,
                          "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                          "yAxis": {"unit": options.get("unit", "s"), "axisPlacement": "left"},
                          "rowsFrame": {"layout": "auto"},
                          "tooltip": {"show": True, "yHistogram": False},
                          "legend": {"show": False}}, **options)


def table(title, description, columns, key, **options):
    """A row for each value of the labels `key`. `columns`: ((heading, expr, unit), ...)."""
    queries = tuple(Query(expr, instant=True) for _, expr, _ in columns)
    names = {f"Value #{chr(ord('A') + i)}": heading for i, (heading, _, _) in enumerate(columns)}
    overrides = [{"matcher": {"id": "byName", "options": heading},
                  "properties": [{"id": "unit", "value": unit}]} for heading, _, unit in columns]
    return Panel("table", title, description, queries, overrides=overrides,
                 transformations=[{"id": "merge", "options": {}},
                                  {"id": "organize", "options": {
                                      "excludeByName": {"Time": True},
                                      "indexByName": {name: i for i, name in
                                                      enumerate((*key, *names))},
                                      "renameByName": names}}],
                 options={"showHeader": True, "cellHeight": "sm"}, **options)


class Dashboard:
    """Lays panels out from left to right, row after row."""

    def __init__(self, uid, title, description, variables):
        self.uid = uid
        self.title = title
        self.description = description
        self.variables = variables
        self.panels = []
        self.x = self.y = self.line_height = 0

    def row(self, title, *panels):
        self.break_line()
        self.panels.append({"id": len(self.panels) + 1, "type": "row", "title": title,
                            "collapsed": False, "panels": [],
                            "gridPos": {"x": 0, "y": self.y, "w": GRID_COLUMNS, "h": 1}})
        self.y += 1
        for panel in panels:
            if self.x + panel.width > GRID_COLUMNS:
                self.break_line()
            self.panels.append(panel.to_json(len(self.panels) + 1, self.x, self.y))
            self.x += panel.width
            self.line_height = max(self.line_height, panel.height)
        self.break_line()

    def break_line(self):
        self.y += self.line_height
        self.x = self.line_height = 0

    def to_json(self):
        return {
            "uid": self.uid, "title": self.title, "description": self.description,
            "tags": ["tessera"], "schemaVersion": 39, "version": 1, "editable": True,
            "graphTooltip": 1, "timezone": "browser", "refresh": "30s", "fiscalYearStartMonth": 0,
            "time": {"from": "now-1h", "to": "now"}, "timepicker": {}, "weekStart": "",
            "templating": {"list": self.variables}, "annotations": {"list": [restarts()]},
            "links": [{"type": "dashboards", "title": "Tessera", "tags": ["tessera"],
                       "asDropdown": False, "includeVars": True, "keepTime": True,
                       "targetBlank": False, "icon": "external link", "tooltip": "", "url": ""}],
            "panels": self.panels}


def restarts():
    """Marks the starts of daemons in every graph."""
    return {"name": "Daemon started", "datasource": DATASOURCE, "enable": True,
            "iconColor": "purple", "titleFormat": "tesserad started", "textFormat": DAEMON,
            "expr": f"time() - process_start_time_seconds{{{DAEMONS}}} < 60"}


def datasource_variable():
    return {"name": "datasource", "label": "Data source", "type": "datasource",
            "query": "prometheus", "current": {}, "hide": 0, "includeAll": False, "multi": False,
            "options": [], "refresh": 1, "regex": "", "skipUrlSync": False}


def label_variable(name, label, expr, all_value=".*"):
    """A choice of values of the label `name`; all of them at first."""
    query = f"label_values({expr}, {name})"
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE,
            "query": {"query": query, "refId": f"variable-{name}"}, "definition": query,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]}, "hide": 0,
            "includeAll": True, "allValue": all_value, "multi": True, "options": [],
            "refresh": 2, "regex": "", "skipUrlSync": False, "sort": 1}


def daemon_variables():
    chosen = 'job=~"$job"'
    return [datasource_variable(),
            # Not ".*": `up` exists for the jobs of other programs, too.
            label_variable("job", "Job", "tessera_build_info", all_value=None),
            label_variable("node", "Node", f"tessera_build_info{{{chosen}}}"),
            label_variable("instance", "Instance",
                           f'tessera_build_info{{{chosen}, node=~"$node"}}')]


def tenant_variables():
    return daemon_variables() + [
        label_variable("tenant", "Tenant", f"tessera_sequences{{{DAEMONS}}}")]
