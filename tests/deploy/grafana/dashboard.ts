// What a dashboard of deploy/grafana may have: Grafana's published types of dashboards and panels, and, of the
// Prometheus data source, the fields of queries and annotations, which it does not publish as types.
import type * as raw from "@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as gauge from "@grafana/schema/dist/esm/raw/composable/gauge/panelcfg/x/GaugePanelCfg_types.gen";
import type * as bargauge from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen";
import type * as timeseries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
import type * as timeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";

interface Query {
    refId: string;
    datasource: raw.DataSourceRef;
    editorMode: "code" | "builder";
    expr: string;
    legendFormat: string;
    range: boolean;
    instant: boolean;
    interval?: string;
}

interface Annotation extends Omit<raw.AnnotationQuery, "target"> {
    target: Query;
    titleFormat: string;
    textFormat: string;
    useValueForTime: boolean;
}

interface Defaults<Custom> extends Omit<raw.FieldConfig, "custom"> {
    custom?: Partial<Custom>;
}

interface Fields<Custom> extends Omit<raw.FieldConfigSource, "defaults"> {
    defaults: Defaults<Custom>;
}

interface Panel<Options, Custom> extends Omit<raw.Panel, "options" | "fieldConfig" | "targets"> {
    id: number;
    title: string;
    description: string;
    gridPos: raw.GridPos;
    // Those that are not there have Grafana's defaults.
    options: Partial<Options>;
    fieldConfig: Fields<Custom>;
    targets: Query[];
}

/** A dashboard, its panels by type. */
export interface Checked {
    dashboard: Omit<raw.Dashboard, "panels" | "annotations"> & { annotations: { list: Annotation[] } };
    panels: {
        row?: raw.RowPanel[];
        stat?: Panel<stat.Options, {}>[];
        gauge?: Panel<gauge.Options, {}>[];
        bargauge?: Panel<bargauge.Options, {}>[];
        timeseries?: Panel<timeseries.Options, timeseries.FieldConfig>[];
        "state-timeline"?: Panel<timeline.Options, timeline.FieldConfig>[];
    };
}
