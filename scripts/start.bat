@echo off
rem For a double click on Windows: open the page in the browser.  The first time, install.py makes the environment.
cd /d "%~dp0.."
if exist ".venv\Scripts\python.exe" goto start
where py >nul 2>nul
if errorlevel 1 (python install.py) else (py -3 install.py)
if errorlevel 1 goto failed
:start
".venv\Scripts\python.exe" -X utf8 -m library web --open_browser %*
if not errorlevel 1 exit /b 0
:failed
pause
exit /b 1
