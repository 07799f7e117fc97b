//! The page as one file: its styles, its program, and in a report the data.

use serde_json::Value;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const CHARTS: &str = include_str!("charts.js");
const PROGRAM: &str = include_str!("page.js");

/// Returns the page that fetches the state of a cluster again and again.
pub(super) fn live(demands_token: bool) -> String {
    let token = if demands_token { "required" } else { "" };
    page(token, &Value::Null)
}

/// Returns the page of a run that has ended, with its data: `job`, `run_dir`, `version`, `written`, `summary`,
/// `history` and `settings`.
pub fn report(data: &Value) -> String {
    page("", data)
}

fn page(token: &str, data: &Value) -> String {
    // In a script no text may end the element.
    let data = data.to_string().replace('<', "\\u003c");
    let script = [CHARTS, PROGRAM].concat();
    let parts = [
        ("{{style}}", STYLE),
        ("{{token}}", token),
        ("{{data}}", &data),
        ("{{script}}", &script),
    ];
    let mut page = String::new();
    let mut rest = PAGE;
    // Each place is filled once, so that no content is taken for a place.
    for (place, content) in parts {
        let (before, after) = rest.split_once(place).unwrap_or((rest, ""));
        page.extend([before, content]);
        rest = after;
    }
    page + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_places_are_filled_and_nothing_comes_from_elsewhere() {
        let page = live(true);
        assert!(!page.contains("{{"), "a place is left");
        assert!(page.ends_with("</html>\n"));
        assert!(page.contains("data-token=\"required\""));
        // The namespaces of SVG are names, and are not fetched.
        let elsewhere = page.replace("http://www.w3.org/2000/svg", "");
        for address in ["http:", "https:", "src=", "@import", "url("] {
            assert!(!elsewhere.contains(address), "{address}");
        }
    }

    #[test]
    fn data_cannot_leave_its_element() {
        let evil = "</script><script>alert(1)</script>{{script}}";
        let page = report(&serde_json::json!({ "job": evil }));
        assert!(!page.contains("<script>alert"), "{page}");
        let data = page.split("id=\"data\">").nth(1).unwrap();
        let data = data.split("</script>").next().unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["job"], evil);
    }
}
