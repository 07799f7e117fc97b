//! Folders of pictures: classes, sizes, channels, and what is refused.

use image::{GrayImage, ImageFormat, Luma, Rgb, RgbImage, RgbaImage};

use super::*;

/// Writes a picture of one color, and makes its folder.
fn colored(folder: &Path, name: &str, sides: (u32, u32), color: [u8; 3]) {
    save(
        folder,
        name,
        RgbImage::from_pixel(sides.0, sides.1, Rgb(color)).into(),
    );
}

fn save(folder: &Path, name: &str, picture: image::DynamicImage) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    picture.save(path).unwrap();
}

fn load_images(folder: &Path, options: &str) -> Result<Dataset, String> {
    let mut data = data("image-folder", folder);
    data.options = options.parse().unwrap();
    load(&data, 1).map_err(|error| error.to_string())
}

#[test]
fn each_folder_is_a_class_of_pictures() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    for i in 0..5 {
        colored(place, &format!("dog/{i}.png"), (3, 2), [255, 51, 0]);
        // Opacity is left out.
        let clear = RgbaImage::from_pixel(3, 2, image::Rgba([0, 102, 255, 7]));
        save(place, &format!("cat/{i}.png"), clear.into());
    }
    std::fs::write(place.join("cat/.hidden"), "x").unwrap();
    std::fs::create_dir(place.join(".cache")).unwrap();
    std::fs::write(place.join("README.md"), "x").unwrap();
    let mut dataset = load_images(place, "").unwrap();
    assert_eq!(fields(&dataset), (vec![3, 2, 3], Some(2)));
    assert_eq!(
        (dataset.training.count(), dataset.evaluation.count()),
        (8, 2)
    );
    for samples in [&mut dataset.training, &mut dataset.evaluation] {
        let (pixels, labels) = all(samples);
        for (picture, label) in pixels.chunks(18).zip(labels) {
            let expected = if label == 0 {
                [0.0, 0.4, 1.0]
            } else {
                [1.0, 0.2, 0.0]
            };
            for (channel, value) in picture.chunks(6).zip(expected) {
                assert_eq!(channel, [value; 6], "class {label}");
            }
        }
    }
    assert_eq!(counts(&labels(&mut dataset.evaluation))[..2], [1, 1]);
    // A share of each class, chosen by the seed.
    let digest = dataset.digest();
    assert_eq!(load_images(place, "").unwrap().digest(), digest);
}

#[test]
fn rows_and_columns_keep_their_places() {
    let folder = tempfile::tempdir().unwrap();
    let picture = GrayImage::from_fn(3, 2, |x, y| Luma([(y * 3 + x) as u8 * 51]));
    for i in 0..2 {
        save(folder.path(), &format!("a/{i}.png"), picture.clone().into());
    }
    let mut dataset = load_images(folder.path(), "").unwrap();
    assert_eq!(fields(&dataset), (vec![1, 2, 3], Some(1)));
    let (pixels, _) = all(&mut dataset.training);
    assert_eq!(pixels, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]);
}

#[test]
fn pictures_of_several_sizes_get_one() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    colored(place, "a/wide.png", (9, 4), [255, 0, 0]);
    colored(place, "a/high.jpeg", (5, 20), [255, 0, 0]);
    save(
        place,
        "b/grey.PNG",
        GrayImage::from_pixel(6, 6, Luma([204])).into(),
    );
    // A name does not tell the format.
    let other = place.join("b/other.jpg");
    let grey = GrayImage::from_pixel(4, 4, Luma([204]));
    grey.save_with_format(other, ImageFormat::Png).unwrap();
    let error = load_images(place, "").unwrap_err();
    assert_says(
        &error,
        &[
            "wide.png",
            "4 rows and 9 columns",
            "high.jpeg",
            "20 rows and 5 columns",
            "data.options.size",
        ],
    );

    let mut dataset = load_images(place, "size = 6").unwrap();
    assert_eq!(fields(&dataset), (vec![3, 6, 6], Some(2)));
    for samples in [&mut dataset.training, &mut dataset.evaluation] {
        let (pixels, labels) = all(samples);
        for (picture, label) in pixels.chunks(3 * 36).zip(labels) {
            let expected = if label == 0 {
                [1.0, 0.0, 0.0]
            } else {
                [0.8; 3]
            };
            for (channel, value) in picture.chunks(36).zip(expected) {
                // JPEG changes a color a little.
                assert!(
                    channel.iter().all(|v| (v - value).abs() < 0.02),
                    "{channel:?}"
                );
            }
        }
    }
}

#[test]
fn pictures_have_the_channels_that_the_job_asks_for() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    for class in ["a", "b"] {
        let grey = GrayImage::from_pixel(2, 2, Luma([204]));
        save(place, &format!("{class}/1.png"), grey.into());
        save(
            place,
            &format!("{class}/2.png"),
            GrayImage::new(2, 2).into(),
        );
    }
    for (options, channels) in [("", 1), ("channels = 1", 1), ("channels = 3", 3)] {
        let mut dataset = load_images(place, options).unwrap();
        assert_eq!(fields(&dataset).0, [channels, 2, 2], "{options}");
        let (pixels, _) = all(&mut dataset.training);
        for picture in pixels.chunks(4 * channels) {
            assert!(picture.iter().all(|value| *value == picture[0]));
        }
    }
    for class in ["a", "b"] {
        for name in ["1", "2"] {
            colored(place, &format!("{class}/{name}.png"), (2, 2), [0, 0, 255]);
        }
    }
    let mut dataset = load_images(place, "channels = 1").unwrap();
    assert_eq!(fields(&dataset).0, [1, 2, 2]);
    // The share of blue in luminance is 7 % (ITU-R BT.709).
    let (pixels, _) = all(&mut dataset.training);
    assert!(
        pixels.iter().all(|value| (value - 0.0722).abs() < 0.01),
        "{pixels:?}"
    );
}

#[test]
fn classes_keep_the_numbers_that_they_had_in_training() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    for class in ["ant", "bee", "cat"] {
        for i in 0..5 {
            colored(
                &place("old"),
                &format!("{class}/{i}.png"),
                (2, 2),
                [9, 9, 8],
            );
        }
    }
    let fitted = load_images(&place("old"), "").unwrap().transforms.unwrap();
    let open = |name: &str, purpose| {
        let opened = Registry::builtin().open(&data("image-folder", &place(name)), 1, purpose);
        opened.map_err(|error| error.to_string())
    };
    // Without the first class, the others would have other numbers.
    for class in ["bee", "cat"] {
        for i in 0..2 {
            colored(
                &place("new"),
                &format!("{class}/{i}.png"),
                (2, 2),
                [9, 9, 8],
            );
        }
    }
    let mut new = open("new", Purpose::Evaluation(&fitted)).unwrap();
    assert_eq!(fields(&new), (vec![3, 2, 2], Some(3)));
    assert_eq!(labels(&mut new.evaluation), [1, 2]);
    // All pictures are predicted, of a folder with or without folders, or a single one.
    let count = |name| {
        open(name, Purpose::Prediction(&fitted))
            .unwrap()
            .evaluation
            .count()
    };
    assert_eq!(
        (count("new"), count("new/bee"), count("new/bee/1.png")),
        (4, 2, 1)
    );
    colored(&place("new"), "dog/0.png", (2, 2), [9, 9, 8]);
    let error = open("new", Purpose::Evaluation(&fitted)).unwrap_err();
    assert_says(&error, &["\"dog\"", "ant, bee, cat"]);
}

#[test]
fn folders_that_cannot_be_read_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    assert_says(
        &load_images(place, "").unwrap_err(),
        &["no folder, one for each class"],
    );
    std::fs::create_dir(place.join("a")).unwrap();
    assert_says(&load_images(place, "").unwrap_err(), &["a has no picture"]);
    colored(place, "a/1.png", (2, 2), [0; 3]);
    assert_says(
        &load_images(place, "").unwrap_err(),
        &["a: there is a single sample"],
    );
    colored(place, "a/2.png", (2, 2), [0; 3]);
    assert!(load_images(place, "").is_ok());
    for (options, parts) in [
        ("size = 0", ["`data.options.size`", "is 0", "at least 1"]),
        (
            "size = 20000",
            ["`data.options.size`", "is 20000", "at most 16384"],
        ),
        (
            "sizes = 3",
            ["`data.options.sizes`", "\"image-folder\"", "takes size"],
        ),
        (
            "channels = 2",
            ["`data.options.channels`", "is 2", "1 (grey) or 3"],
        ),
    ] {
        assert_says(&load_images(place, options).unwrap_err(), &parts);
    }

    let good = std::fs::read(place.join("a/1.png")).unwrap();
    let bad = place.join("a/3.png");
    std::fs::write(&bad, "GIF89a and more").unwrap();
    assert_says(
        &load_images(place, "").unwrap_err(),
        &["3.png", "cannot be read as PNG or JPEG"],
    );
    for end in 0..good.len() {
        std::fs::write(&bad, &good[..end]).unwrap();
        // Without its last bytes, a checksum, a picture is whole.
        if end < good.len() - 16 {
            assert_says(&load_images(place, "").unwrap_err(), &["3.png"]);
        }
    }
    // A header that promises more pixels than memory has.
    let mut huge = good.clone();
    huge[16..24].copy_from_slice(&[0, 0, 0x3f, 0xff, 0, 0, 0x7f, 0xff]);
    std::fs::write(&bad, huge).unwrap();
    assert_says(
        &load_images(place, "").unwrap_err(),
        &["3.png", "cannot be read"],
    );
}

/// Returns a JPEG of two halves, the left one bright, with the note of a camera that it is turned clockwise to be shown.
fn turned() -> Vec<u8> {
    let halves = GrayImage::from_fn(16, 16, |x, _| Luma([if x < 8 { 250 } else { 5 }]));
    let mut jpeg = std::io::Cursor::new(Vec::new());
    halves.write_to(&mut jpeg, ImageFormat::Jpeg).unwrap();
    // A TIFF header, and a directory with one entry: orientation (0x112), a short, 6.
    let mut exif =
        b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0".to_vec();
    let mut file = vec![0xff, 0xd8, 0xff, 0xe1];
    file.extend((exif.len() as u16 + 2).to_be_bytes());
    file.append(&mut exif);
    file.extend(&jpeg.into_inner()[2..]);
    file
}

#[test]
fn pictures_are_turned_as_they_are_shown_and_predicted_in_the_shape_of_the_training() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    for i in 0..3 {
        for class in ["a", "b"] {
            std::fs::create_dir_all(place.join(class)).unwrap();
            std::fs::write(place.join(format!("{class}/{i}.jpg")), turned()).unwrap();
        }
    }
    let mut dataset = load_images(place, "").unwrap();
    assert_eq!(fields(&dataset).0, [1, 16, 16]);
    let (pixels, _) = all(&mut dataset.training);
    let mean = |rows: std::ops::Range<usize>| {
        let values = &pixels[rows.start * 16..rows.end * 16];
        values.iter().sum::<f32>() / values.len() as f32
    };
    assert!(
        mean(0..7) > 0.9 && mean(9..16) < 0.1,
        "the upper half is bright"
    );

    // A colored and larger picture becomes what the model was trained on.
    let fitted = dataset.transforms.unwrap();
    let other = tempfile::tempdir().unwrap();
    colored(other.path(), "x.png", (40, 30), [200, 200, 200]);
    let data = data("image-folder", other.path());
    let predicted = Registry::builtin()
        .open(&data, 1, Purpose::Prediction(&fitted))
        .unwrap();
    assert_eq!(fields(&predicted).0, [1, 16, 16]);
    // In an evaluation of other data, all of it counts.
    let data = super::data("image-folder", place);
    let whole = Registry::builtin()
        .open(&data, 1, Purpose::EvaluationOfAll(&fitted))
        .unwrap();
    assert_eq!(whole.evaluation.count(), 6);
}
