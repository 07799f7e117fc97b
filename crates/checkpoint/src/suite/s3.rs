//! The suite against a real server of the S3 protocol, and the secrets that no message shows.

use std::io::{Read, Write};
use std::net::TcpListener;

use storage::testing::Moto;

use super::{owners, save, stores};
use crate::error::CheckpointError;
use crate::location::{load_from, resolve_with};
use crate::store::Store;

const KEY: &str = "AKIAFLAMBEAUTEST0001";
const SECRET: &str = "c3VjaCBhIHNlY3JldCBrZXk";
const TOKEN: &str = "token-of-a-session-0001";

fn variables(address: &str) -> Vec<(String, String)> {
    [
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", TOKEN),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT", address),
        ("AWS_ALLOW_HTTP", "true"),
        ("HOME", "/root"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

fn shows_no_key(text: &str) {
    for secret in [KEY, SECRET, TOKEN, "hunter2"] {
        assert!(!text.contains(secret), "{text}");
    }
}

/// Opens a store of the server.
fn open(moto: &Moto, location: &str) -> Store {
    Store::open_with(location, &variables(moto.address())).unwrap()
}

#[tokio::test]
async fn in_a_bucket() {
    let Some(moto) = Moto::start("checkpoints") else {
        return;
    };
    let mut number = 0;
    stores::suite(|| {
        number += 1;
        open(&moto, &format!("s3://bucket/runs/{number}"))
    })
    .await;

    owners::suite_with_time(|| {
        number += 1;
        open(&moto, &format!("s3://bucket/runs/{number}"))
    })
    .await;

    // At the root of a bucket, and by each form of location that a user may give.
    assert!(moto.request("PUT /other", "").contains("200"));
    let variables = variables(moto.address());
    let store = open(&moto, "s3://other");
    save(&store, 1).await;
    save(&open(&moto, "s3://other/run/checkpoints"), 2).await;
    let run = "s3://other/run/checkpoints";
    for (location, expected) in [
        ("s3://other", ("s3://other", None)),
        ("s3://other/run", (run, None)),
        ("s3://other/run/", (run, None)),
        (run, (run, None)),
        (
            "s3://other/checkpoint-000000000001",
            ("s3://other", Some(1)),
        ),
    ] {
        let (store, number) = resolve_with(location, &variables).await.unwrap();
        assert_eq!((store.location(), number), expected);
        let manifest = load_from(&store, number).await.unwrap();
        store.verify(&manifest).await.unwrap();
    }
    let error = resolve_with("s3://other/absent", &variables)
        .await
        .unwrap_err();
    assert!(matches!(error, CheckpointError::NotFound(_)), "{error:?}");

    let absent = open(&moto, "s3://no-such-bucket/x");
    for error in [
        absent.try_claim(&super::claim("x", 1)).await.unwrap_err(),
        absent.list().await.unwrap_err(),
    ] {
        assert!(
            error.to_string().ends_with("there is no such bucket"),
            "{error:?}"
        );
        shows_no_key(&format!("{error} {error:?}"));
    }

    // From here on the server accepts no key.
    assert!(
        moto.request("POST /moto-api/reset-auth", "0")
            .contains("200")
    );
    for error in [
        store.try_claim(&super::claim("x", 1)).await.unwrap_err(),
        store.list().await.unwrap_err(),
        store.manifest(1).await.unwrap_err(),
    ] {
        assert!(matches!(error, CheckpointError::Denied { .. }), "{error:?}");
        assert!(error.to_string().contains("InvalidAccessKeyId"), "{error}");
        assert!(error.to_string().starts_with("s3://other"), "{error}");
        shows_no_key(&format!("{error} {error:?}"));
    }
}

/// Starts a server that quotes the whole request in its answer, as S3 does after a wrong signature.
fn indiscreet(status: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://user:hunter2@{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap();
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            let body = format!("{request} {KEY} {SECRET} {TOKEN} http://user:hunter2@host/x");
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
        }
    });
    address
}

#[tokio::test]
async fn no_message_shows_a_key() {
    for status in ["403 Forbidden", "401 Unauthorized", "400 Bad Request"] {
        let variables = variables(&indiscreet(status));
        let store = Store::open_with("s3://bucket/run", &variables).unwrap();
        shows_no_key(&format!("{store:?} {}", store.location()));
        assert_eq!(format!("{store:?}"), "Store(\"s3://bucket/run\")");
        for error in [
            store.try_claim(&super::claim("x", 1)).await.unwrap_err(),
            store.list().await.unwrap_err(),
            store.manifest(1).await.unwrap_err(),
        ] {
            shows_no_key(&format!("{error} {error:?} {error:#?}"));
            assert!(error.to_string().contains("(hidden)"), "{error}");
            assert!(matches!(error, CheckpointError::Denied { .. }), "{error:?}");
        }
    }
}

#[test]
fn a_location_with_a_password_is_refused_without_showing_it() {
    for location in [
        "s3://user:hunter2@bucket/run",
        "s3://bucket/run?X-Amz-Signature=hunter2",
        "http://user:hunter2@host/run",
        "s3://hunter2@bucket",
    ] {
        let error = Store::open(location).unwrap_err();
        assert!(matches!(error, CheckpointError::Location { .. }));
        shows_no_key(&format!("{error} {error:?}"));
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let mut variables = variables("http://127.0.0.1:1");
    variables.push(("AWS_ALLOW_HTTP".to_owned(), "perhaps".to_owned()));
    let error = Store::open_with("s3://bucket/run", &variables).unwrap_err();
    assert!(
        matches!(error, CheckpointError::Location { .. }),
        "{error:?}"
    );
    variables.retain(|(name, _)| name != "AWS_SECRET_ACCESS_KEY" && name != "AWS_ALLOW_HTTP");
    let error = Store::open_with("s3://bucket/run", &variables).unwrap_err();
    shows_no_key(&format!("{error} {error:?}"));
}
